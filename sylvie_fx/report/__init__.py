"""What a person reads: tables of exchanges, program text, comparison reports."""
