"""Who may talk to a parameter server: proofs, signed records, and where they are kept."""
