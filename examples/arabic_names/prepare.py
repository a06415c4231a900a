"""The PyPI package arabic-name-romanizer brings its weights as ONNX graphs: here they become a state dict, and its
letters a tokenizer. `python prepare.py RESOURCES OUT`, where RESOURCES is the package's folder of that name."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

resources, out = Path(sys.argv[1]), Path(sys.argv[2])


def arrays(name: str) -> dict[str, np.ndarray]:
    tensors = onnx.load(resources / f"{name}.onnx").graph.initializer
    return {each.name.removeprefix("m."): onnx.numpy_helper.to_array(each) for each in tensors}


def torch_order(array: np.ndarray) -> np.ndarray:
    """ONNX has a GRU's gates as update, reset, new; torch begins with reset."""
    update, reset, new = np.split(array, 3)
    return np.concatenate([reset, update, new])


encoder, decoder = arrays("encoder"), arrays("decoder")
weights = {name: array for name, array in {**encoder, **decoder}.items() if not name.startswith("onnx::")}
unnamed = [array for name, array in sorted(encoder.items()) if name.startswith("onnx::GRU")]
for layer, (bias, inner, recurrent) in enumerate((unnamed[:3], unnamed[3:])):
    for way, end in enumerate(("", "_reverse")):
        parts = {"weight_ih": inner[way], "weight_hh": recurrent[way]}
        parts |= dict(zip(("bias_ih", "bias_hh"), np.split(bias[way], 2), strict=True))
        weights |= {f"encoder.{name}_l{layer}{end}": torch_order(array) for name, array in parts.items()}
query, combine = [array for name, array in sorted(decoder.items()) if name.startswith("onnx::MatMul")]
weights |= {"attn_q.weight": query.T, "combine.weight": combine.T}
save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, out / "weights.safetensors")
words = json.loads((resources / "vocab.json").read_text(encoding="utf-8"))["tokens"]
tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<UNK>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
tokenizer.decoder = decoders.Fuse()
tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in words if len(word) > 1])
tokenizer.post_processor = processors.TemplateProcessing(single="$A <EOS>", special_tokens=[("<EOS>", 2)])
tokenizer.save(str(out / "tokenizer.json"))
