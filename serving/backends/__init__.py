"""Where graphs run. `contract/backend.py` says what a backend has to do; `slots.py` is what all of them share, `cpu.py`
and `gpu.py` are the backends, and `onnxruntime_*.py` and `tensorrt.py` run the graphs for them."""
