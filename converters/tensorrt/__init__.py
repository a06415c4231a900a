"""From the graphs of a version to TensorRT plans: parse -> lint -> profiles -> build.

One core for both libraries: `tensorrt` builds for the GPU that is there, `tensorrt_rtx` for any that it knows, also on
a machine without one.
"""
