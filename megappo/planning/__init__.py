"""What a configuration will cost, computed before anything starts: memory, communication, time. No torch here."""
