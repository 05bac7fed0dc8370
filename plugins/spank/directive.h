/* The grammar of --elastic=MIN-MAX[,key=value...]; see docs/directive.md. */
#ifndef SLURM_ELASTIC_DIRECTIVE_H
#define SLURM_ELASTIC_DIRECTIVE_H

/* Longest directive accepted, in bytes. */
#define DIRECTIVE_MAX_BYTES 256

/* What is wrong with a directive: the faulty part as written, and what to write instead. */
struct directive_error {
	char part[DIRECTIVE_MAX_BYTES + 32];
	char reason[2 * DIRECTIVE_MAX_BYTES];
};

/* Returns 0, or -1 with the error filled in. */
int directive_check(const char *text, struct directive_error *error);

/* The directive as a terminal may show it: a question mark for every byte that is not printable
 * ASCII, cut to the longest one accepted. size is that of the buffer. */
void directive_printable(const char *text, char *buffer, int size);

#endif
