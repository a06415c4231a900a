"""Any encoder-decoder built on `torch.nn.RNN`, `LSTM` or `GRU`, through a small config that names its parts.

    {
      "family": "torch_recurrent",
      "weights": "model.safetensors",          or .npz, .pt, .pth; may be left out where there is only one
      "tokenizer": "spm.model",                 or a tokenizer.json
      "encoder": "encoder.rnn",                 where the nn.GRU (or RNN, LSTM) is in the state dict
      "decoder": "decoder.rnn",                 the same; or an nn.GRUCell (RNNCell, LSTMCell), or a list of them
      "source_embedding": "encoder.embedding.weight",
      "target_embedding": "decoder.embedding.weight",
      "output": "decoder.out.weight",           the same tensor as the target embedding: tied
      "output_bias": "decoder.out.bias",
      "bridge": "tanh",                         or "zero", "copy", "linear"
      "bridge_hidden": ["encoder.fc"],          by decoder layer, the nn.Linear that makes its first state
      "attention": "additive",                  or "none", "dot", "scaled_dot", "general"
      "attention_query": "decoder.attention.query",       general attention has only one of these two
      "attention_key": "decoder.attention.key", the same name twice: one nn.Linear over [query, key]
      "attention_energy": "decoder.attention.v",
      "attention_order": "previous",            the state before a step asks, or the "new" one
      "decoder_input": ["embedding", "context"],          what enters the decoder, in this order; "fed": input feeding
      "readout_input": ["hidden", "context", "embedding"],  what leaves it, likewise, towards the output
      "max_positions": 256,
      "pad_id": 0, "eos_id": 3, "decoder_start_id": 2
    }

Optional: "readout" (an nn.Linear before the output) with "readout_activation"; "bridge_cell" (an LSTM's second state),
"bridge_from" ("each": layer by layer; or the encoder's "top" or "mean"), "merge", "reverse_source", "nonlinearity" (of
an nn.RNN), "attention_activation", "window", "window_radius", "attention_place" and "attention_place_energy" (of a
predicted window), "context_gate" (an nn.Linear over the state), "source_eos", "decoding", "source_language",
"target_language", "description". `RecurrentConfig` says what they mean. Widths, depths and directions are read off the
weights.

A model that reads feature vectors (an image's grid, frames) says how many values each has, "source_features", instead
of "source_embedding"; "feature_projection" names an nn.Linear that they go through first, and "encoder" may be left
out. `examples/show_attend_tell.json` is such a config.

Where source and target have two embeddings, "source_tokenizer", "target_tokenizer", "source_example" and
"target_example" stand in the place of "tokenizer": see `torch_transformer.py`.
"""

from __future__ import annotations

from typing import ClassVar

from beamline.converters.checkpoints.files import fill, named_weights, read_parts, read_weights
from beamline.converters.loaders.named_parts import NamedPartsConverter
from beamline.converters.loaders.torch_recurrent_original import Linear, Original
from beamline.converters.loaders.torch_recurrent_state_dict import RecurrentStateDict, TorchRecurrentParts
from beamline.converters.modules.recurrent.encoder_decoder import Recurrent
from beamline.converters.modules.recurrent.steps import RecurrentSteps
from beamline.converters.tasks.generation import LoadedModel
from beamline.serving.errors import UnsupportedCheckpoint


class TorchRecurrentConverter(NamedPartsConverter):
    family = "torch_recurrent"
    model_types: ClassVar[tuple[str, ...]] = (family,)
    description = "encoder-decoders on `torch.nn.RNN`, `LSTM` or `GRU`; a file names their parts"

    def load(self) -> LoadedModel:
        parts = read_parts(TorchRecurrentParts, self.config)
        tensors = read_weights(self.source, named_weights(self.source, parts.weights))
        state_dict = RecurrentStateDict(parts, tensors, self.config.name)
        if state_dict.reasons:
            raise UnsupportedCheckpoint(str(self.source), state_dict.reasons)
        config = state_dict.config()
        if config.problems():
            raise UnsupportedCheckpoint(str(self.source), config.problems())
        model = Recurrent(config)
        mapped = state_dict.mapped(config)
        fill(model, mapped, str(self.source), state_dict.names_of(mapped))
        model.eval()
        original = Original(
            config=config,
            encoder=state_dict.encoder,
            decoder=state_dict.decoder,
            embed_source=state_dict.embed_source,
            target_embedding=state_dict.tensors[parts.target_embedding],
            linears=state_dict.linears,
            output=Linear(state_dict.tensors[parts.output], state_dict.optional(parts.output_bias)),
            decoder_input=parts.decoder_input,
            readout_input=parts.readout_input,
        )
        sizes = config.source_vocab_size, config.target_vocab_size
        return self._loaded(parts, *sizes, RecurrentSteps(model), original)
