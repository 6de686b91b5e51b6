"""Proofs of Qwen4Exp (Qwen3.8-Flash-Next) with a small model of that architecture."""
