"""Generators of pages, schemas and pictures."""
