"""Policy `ones`: an evolving population of schedules (ONES, SC'21)."""
