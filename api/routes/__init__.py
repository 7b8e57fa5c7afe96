"""The routes: bytes in, one call of the service, bytes out."""
