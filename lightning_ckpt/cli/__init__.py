"""The command line `lightning-ckpt`."""
