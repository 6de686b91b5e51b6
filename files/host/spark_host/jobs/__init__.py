"""Jobs: slow work that systemd runs; done only when the result is verified."""
