"""Where bytes come from: hubs, mirrors, donors, this host; every byte checked while it is read."""
