"""Access to a parameter server: proofs, signed records and the queue for connections."""
