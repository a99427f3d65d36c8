"""Stand-ins for classes of other libraries, with specgen's engine inside."""
