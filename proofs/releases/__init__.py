"""Planned releases, served on a CUDA machine as on hosts, and tested over HTTP."""
