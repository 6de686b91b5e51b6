"""N-gram embedding tables (PLE) of Qwen4Exp that stay in a file."""
