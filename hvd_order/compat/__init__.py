"""Other products' interfaces."""
