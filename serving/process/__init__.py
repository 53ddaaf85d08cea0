"""The processes of a service: one, or several that share a port, and the connections that they take."""
