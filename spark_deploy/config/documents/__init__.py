"""YAML and JSON documents: read, and checked against a schema, with every mistake as a sentence."""
