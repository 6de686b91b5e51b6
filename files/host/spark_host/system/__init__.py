"""The host as our tools see it: systemd, docker, programs and files; used by every other room."""
