"""Who serves the most within its bound: Headway against what one would use instead, on the same engines and traffic."""
