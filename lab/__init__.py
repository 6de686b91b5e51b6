"""Virtual lab: hosts with real systemd, sshd, apt and dockerd; only hardware is imitated."""
