"""The steps of a deploy, each a pyinfra deploy that calls operations."""
