"""The steps of deploys: host, slow jobs, services."""
