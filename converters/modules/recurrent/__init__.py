"""Recurrent networks: cells, attention, encoder-decoders, language models, classifiers and embedders."""
