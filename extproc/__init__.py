"""Everything of Headway that touches the world: gRPC, sockets, HTTP, files, clocks."""
