/*
 * Runs the plugin's hooks as one command would: the fuzzer's input gives the command, its
 * arguments, its environment and the values of --elastic. The functions of Slurm are replaced by
 * ones that check their arguments.
 *
 * The input: one byte of flags, then fields that end with a zero byte: the command line (bytes 1
 * stand between arguments), SLURM_ELASTIC, and the values of --elastic in the order of callbacks.
 */

#include <stdio.h>

static FILE *open_arguments(const char *path, const char *mode);

/* Included, so that its static state can be reset. */
#define fopen open_arguments
#include "../elastic.c"
#undef fopen
#include "../slurm_release.c"

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
/* What the plugin should pass on, and what it passed. */
static char expected[MAX_BYTES], passed[MAX_BYTES];
static bool is_expected, is_passed;
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
	CHECK(!is_passed && strlen(value) < sizeof(passed));
	check_printable(value, 0x20);
	strcpy(passed, value);
	is_passed = true;
	return (flags & CANNOT_SET ? ESPANK_ERROR : ESPANK_SUCCESS);
}

long slurm_api_version(void)
{
	return ((long)SLURM_26_05 << 16);
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

/* Return the next field, and move data and size behind it. */
static char *next_field(const uint8_t **data, size_t *size)
{
	size_t length = 0;
	char *field;

	while (length < *size && (*data)[length] != 0)
		length++;
	/* No spare byte: the sanitizer reports any read beyond the end. */
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

/* Make the text what the plugin should pass on: cut, with question marks. */
static void clean(char *text)
{
	if (strlen(text) > MAX_BYTES - 1)
		text[MAX_BYTES - 1] = '\0';
	for (; *text != '\0'; ++text)
		if ((unsigned char)*text < ' ' || (unsigned char)*text > '~')
			*text = '?';
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
	memset(directive, 0x7f, sizeof(directive));
	is_given = false;
	on_command_line = false;
	open_mode_is_ours = -1;
	registered = NULL;
	is_expected = is_passed = false;
	errors = 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *environment;
	bool client, failed;

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
			bool differs, remote = (flags & IS_REMOTE) != 0;
			int result = registered->cb(0, text, remote);

			clean(text);
			differs = is_expected && strcmp(text, expected) != 0;
			/* Only a second, different value in the script is refused, in one line. */
			CHECK((result != 0) == (differs && !remote && !on_command_line));
			CHECK(errors == (result != 0));
			if (result == 0 && !remote) {
				strcpy(expected, text);
				is_expected = true;
			}
			free(text);
			if (result != 0)
				break;
		}
	} else {
		CHECK(registered == NULL || errors == 1);
	}
	if (client) {
		CHECK(on_command_line == given_on_command_line());
		if (flags & HAS_ENVIRONMENT && environment[0] != '\0' && !on_command_line) {
			clean(environment);
			strcpy(expected, environment);
			is_expected = true;
		}
	}
	failed = slurm_spank_init_post_opt(NULL, 0, NULL) != 0;
	CHECK(is_passed == (client && is_expected));
	CHECK(!is_passed || strcmp(passed, expected) == 0);
	CHECK(failed == (is_passed && flags & CANNOT_SET));
	/* The environment is left as it was. */
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
