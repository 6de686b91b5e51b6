"""Jobs: slow work that systemd runs; done only when its result is verified."""
