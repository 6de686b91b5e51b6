"""Sources of checkpoint bytes: hubs, mirrors, peers, local files. Every byte is verified."""
