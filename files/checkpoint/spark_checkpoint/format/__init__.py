"""The safetensors format and its numbers: pure reading and writing; used by every other room."""
