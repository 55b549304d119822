"""What lies below the pool: one protocol, and the places that speak it."""
