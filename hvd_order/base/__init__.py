"""What every other package stands on: errors, settings, plain data. No framework."""
