"""The compiled modules, and what finds the engine for the installed PyTorch."""
