/*
 * For tests: checks each argument and prints "ok", or the faulty part and the message; without
 * arguments, each line of standard input, two hexadecimal digits to a byte.
 */

#include "directive.h"

#include <stdio.h>
#include <string.h>

static void check(const char *text)
{
	char shown[DIRECTIVE_MAX_BYTES + 8];
	struct directive_error error;

	if (directive_check(text, &error) == 0) {
		puts("ok");
		return;
	}
	directive_printable(text, shown, sizeof(shown));
	printf("%s\t--elastic=%s: %s\n", error.part, shown, error.reason);
}

int main(int argc, char **argv)
{
	char line[65536], text[sizeof(line) / 2];
	unsigned int byte;

	for (int i = 1; i < argc; ++i)
		check(argv[i]);
	while (argc == 1 && fgets(line, sizeof(line), stdin) != NULL) {
		size_t length = 0;

		while (length < sizeof(text) - 1 && sscanf(line + 2 * length, "%2x", &byte) == 1)
			text[length++] = (char)byte;
		text[length] = '\0';
		check(text);
	}
	return (0);
}
