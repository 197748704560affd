"""How a rank joins its process groups and its device, and how it leaves them."""
