"""What our own tools on a host say: releases, jobs, gateway, stored weights."""
