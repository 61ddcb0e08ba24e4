"""TRL's own tests run with the trainers of this package, on stand-ins for what they load from the Hub."""
