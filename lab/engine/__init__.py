"""The lab's engine: real vLLM, built for CPUs, as the base image of the same Dockerfile."""
