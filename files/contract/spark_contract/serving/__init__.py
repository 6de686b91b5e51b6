"""What is served: releases, their gateway, what a host writes down and tells of them."""
