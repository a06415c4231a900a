"""Where graphs run. `base.py` says what a device has to do; each other module is one device."""
