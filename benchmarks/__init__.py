"""Side by side with peers and with the machine's own limits: `python -m benchmarks NAME`."""
