"""Slow work: orders for trees and images, and what vouches for them."""
