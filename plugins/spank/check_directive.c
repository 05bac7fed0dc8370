/* For tests: checks each argument and prints "ok", or the faulty part and the message. */

#include "directive.h"

#include <stdio.h>

int main(int argc, char **argv)
{
	char text[DIRECTIVE_MAX_BYTES + 8];
	struct directive_error error;

	for (int i = 1; i < argc; ++i) {
		if (directive_check(argv[i], &error) == 0) {
			puts("ok");
			continue;
		}
		directive_printable(argv[i], text, sizeof(text));
		printf("%s\t--elastic=%s: %s\n", error.part, text, error.reason);
	}
	return (0);
}
