"""The host: systemd, docker, programs and files; used by every other package."""
