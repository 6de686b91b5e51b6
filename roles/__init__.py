"""The steps of deploys: of the machine, of slow work, of what is served."""
