"""One toolbox for all Transformers: an encoder-decoder has two stacks of its layers, a language model has one.

config.py       what shapes a stack; encoder and decoder each have a configuration of their own
attention.py    self- and cross-attention: head widths, grouped queries, biases
norms.py        LayerNorm and RMSNorm
layers.py       activations, feed-forward, and the layer that puts all together
embedding.py    tokens and positions: sinusoidal, learned, rotary or none
relative.py     what attention adds for distances, along the tree too
encoder_decoder.py, decoder_only.py    the models, for a whole text at once
steps.py        the same models token by token, over the tree in the KV cache: what is exported
reference.py    the encoder-decoder that our own checkpoints hold, with their flat configuration
"""
