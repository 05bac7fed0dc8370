/*
 * One life of the plugin in a command, as the fuzzer's input says: which command, its arguments,
 * its environment, and the values of --elastic. A Slurm that is not there checks what it is told.
 *
 * The input: one byte of flags, then fields that end with a zero byte: the command line (bytes 1
 * stand between arguments), SLURM_ELASTIC, and the values of --elastic in the order of callbacks.
 */

#include <stdio.h>

static FILE *open_arguments(const char *path, const char *mode);

/* The plugin's state is static: it is part of this file. */
#define fopen open_arguments
#include "../elastic.c"
#undef fopen

#include <stdarg.h>
#include <stdint.h>

#define CHECK(condition)                                                                \
	do {                                                                            \
		if (!(condition)) {                                                     \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
			abort();                                                        \
		}                                                                       \
	} while (0)

enum {
	HAS_ENVIRONMENT = 4,
	HAS_OPEN_MODE = 8,
	IS_REMOTE = 16,
	CANNOT_SET = 32,
	CANNOT_REGISTER = 64,
	MAX_VALUES = 8,
};

static const enum spank_context contexts[] = {
	S_CTX_ALLOCATOR, S_CTX_LOCAL, S_CTX_REMOTE, S_CTX_JOB_SCRIPT
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t flags;
static char arguments[4096];
static size_t arguments_length;
static struct spank_option *registered;
static char passed[DIRECTIVE_MAX_BYTES + 8];
static int errors;

static FILE *open_arguments(const char *path, const char *mode)
{
	CHECK(strcmp(path, "/proc/self/cmdline") == 0 && mode[0] == 'r');
	return (arguments_length > 0 ? fmemopen(arguments, arguments_length, "r") : NULL);
}

static void check_printable(const char *text, char least)
{
	for (; *text != '\0'; ++text)
		CHECK(*text >= least && *text <= 0x7e);
}

enum spank_context spank_context(void)
{
	return (contexts[flags & 3]);
}

spank_err_t spank_option_register(spank_t sp, struct spank_option *option)
{
	(void)sp;
	registered = option;
	return (flags & CANNOT_REGISTER ? ESPANK_ERROR : ESPANK_SUCCESS);
}

spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp;
	CHECK(strcmp(name, "ELASTIC") == 0 && overwrite == 1);
	CHECK(value[0] != '\0' && strlen(value) < sizeof(passed));
	check_printable(value, 0x21);
	strcpy(passed, value);
	return (flags & CANNOT_SET ? ESPANK_ERROR : ESPANK_SUCCESS);
}

void slurm_error(const char *format, ...)
{
	char line[4096];
	va_list args;
	int length;

	va_start(args, format);
	length = vsnprintf(line, sizeof(line), format, args);
	va_end(args);
	CHECK(length > 0 && length < 2048);
	CHECK(strncmp(line, "elastic: ", 9) == 0);
	check_printable(line, 0x20);
	errors++;
}

/* The next field, and the bytes behind it. */
static char *next_field(const uint8_t **data, size_t *size)
{
	size_t length = 0;
	char *field;

	while (length < *size && (*data)[length] != 0)
		length++;
	/* Exactly as long as it must be, so that a byte read too far is seen. */
	field = malloc(length + 1);
	CHECK(field != NULL);
	memcpy(field, *data, length);
	field[length] = '\0';
	*data += length;
	*size -= length;
	if (*size > 0) {
		++*data;
		--*size;
	}
	return (field);
}

/* What directive_check promises of any text; whether it accepts it. */
static bool check_directive(const char *text)
{
	struct directive_error error, again;
	char shown[DIRECTIVE_MAX_BYTES + 8];
	int result;

	memset(&error, 0x7f, sizeof(error));
	memset(&again, 0x7f, sizeof(again));
	result = directive_check(text, &error);
	CHECK(result == directive_check(text, &again));
	directive_printable(text, shown, sizeof(shown));
	check_printable(shown, 0x21);
	if (result == 0)
		return (true);
	CHECK(result == -1);
	CHECK(memchr(error.part, '\0', sizeof(error.part)) != NULL);
	CHECK(memchr(error.reason, '\0', sizeof(error.reason)) != NULL);
	CHECK(strcmp(error.part, again.part) == 0 && strcmp(error.reason, again.reason) == 0);
	/* Complete: the message was not cut, and names what it is about. */
	CHECK(strlen(error.reason) < sizeof(error.reason) - 1 && strlen(error.reason) > 10);
	check_printable(error.part, 0x20);
	check_printable(error.reason, 0x20);
	return (false);
}

static void read_command(const uint8_t **data, size_t *size)
{
	char *field = next_field(data, size);

	arguments_length = strlen(field);
	if (arguments_length >= sizeof(arguments))
		arguments_length = sizeof(arguments) - 1;
	memcpy(arguments, field, arguments_length);
	for (size_t i = 0; i < arguments_length; ++i)
		if (arguments[i] == 1)
			arguments[i] = '\0';
	if (arguments_length > 0)
		arguments[arguments_length++] = '\0';
	free(field);
}

/* Whether an argument is --elastic or an abbreviation that sbatch takes for it. */
static bool given_on_command_line(void)
{
	for (size_t at = 0; at < arguments_length; at += strlen(arguments + at) + 1) {
		size_t length = strcspn(arguments + at, "=");

		if (length >= strlen("--el") && strncmp(arguments + at, "--elastic", length) == 0)
			return (true);
	}
	return (false);
}

static void reset(void)
{
	memset(directive, 0, sizeof(directive));
	on_command_line = false;
	open_mode_is_ours = -1;
	registered = NULL;
	passed[0] = '\0';
	errors = 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *environment;
	bool client, accepted = false;

	if (size == 0 || size > 4000)
		return (0);
	reset();
	flags = *data++;
	size--;
	read_command(&data, &size);
	environment = next_field(&data, &size);
	if (flags & HAS_ENVIRONMENT)
		setenv(ENVIRONMENT, environment, 1);
	else
		unsetenv(ENVIRONMENT);
	unsetenv(OPEN_MODE);
	if (flags & HAS_OPEN_MODE)
		setenv(OPEN_MODE, "truncate", 1);
	for (size_t i = 0; i < sizeof(inherited) / sizeof(inherited[0]); ++i)
		setenv(inherited[i], "2-4", 1);
	client = spank_context() == S_CTX_ALLOCATOR || spank_context() == S_CTX_LOCAL;

	if (slurm_spank_init(NULL, 0, NULL) == 0 && registered != NULL) {
		for (int i = 0; i < MAX_VALUES && size > 0; ++i) {
			char *text = next_field(&data, &size);
			bool sound = check_directive(text);
			int before = errors;
			int result = registered->cb(0, text, (flags & IS_REMOTE) != 0);

			/* A refusal says why, in one line; nothing else is said. */
			CHECK((result == 0) == (errors == before) && errors <= before + 1);
			CHECK(flags & IS_REMOTE || sound || result == -1);
			if (result == 0 && !(flags & IS_REMOTE))
				accepted = true;
			free(text);
			if (result != 0)
				break; /* the command ends here */
		}
		if (errors == 0)
			CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == (errors == 0 ? 0 : -1));
		else
			slurm_spank_init_post_opt(NULL, 0, NULL);
	} else {
		CHECK(registered == NULL || errors == 1);
		slurm_spank_init_post_opt(NULL, 0, NULL);
	}
	check_directive(environment);
	if (client)
		CHECK(on_command_line == given_on_command_line());
	if (!client || (!accepted && !(flags & HAS_ENVIRONMENT)))
		CHECK(passed[0] == '\0' || (accepted && !client));
	/* Nobody's environment is left changed. */
	if (flags & HAS_OPEN_MODE)
		CHECK(getenv(OPEN_MODE) != NULL && strcmp(getenv(OPEN_MODE), "truncate") == 0);
	else
		CHECK(getenv(OPEN_MODE) == NULL);
	if (spank_context() == S_CTX_ALLOCATOR)
		for (size_t i = 0; i < sizeof(inherited) / sizeof(inherited[0]); ++i)
			CHECK(getenv(inherited[i]) == NULL);
	free(environment);
	return (0);
}
