"""One file per engine family: how much of a cached prefix it reuses, and how it fills a step."""
