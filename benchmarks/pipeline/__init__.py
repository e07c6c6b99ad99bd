"""How closely the executor keeps to a schedule's simulation, with stages whose computing is a wait."""
