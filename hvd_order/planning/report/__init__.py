"""Pictures and tables from traces and simulations."""
