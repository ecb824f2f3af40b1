"""How short a step can be."""
