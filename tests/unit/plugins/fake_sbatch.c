/*
 * Replacement for sbatch: runs the plugin's hooks in sbatch's order and prints the value that
 * reaches job_submit.lua, in hexadecimal. Arguments: script=VALUE, an #SBATCH line; --elastic=VALUE.
 */

#include "../../../plugins/spank/elastic.c"
#include "../../../plugins/spank/slurm_release.c"

#include <stdarg.h>

static struct spank_option *registered;

enum spank_context spank_context(void)
{
	return (S_CTX_ALLOCATOR);
}

spank_err_t spank_option_register(spank_t sp, struct spank_option *option)
{
	(void)sp;
	registered = option;
	return (ESPANK_SUCCESS);
}

spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	(void)sp;
	(void)overwrite;
	printf("%s ", name);
	for (; *value != '\0'; ++value)
		printf("%02x", (unsigned char)*value);
	putchar('\n');
	return (ESPANK_SUCCESS);
}

long slurm_api_version(void)
{
	return ((long)SLURM_26_05 << 16);
}

void slurm_error(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
}

static void read_values(char **argv, const char *prefix)
{
	for (; *argv != NULL; ++argv)
		if (strncmp(*argv, prefix, strlen(prefix)) == 0 &&
		    registered->cb(0, *argv + strlen(prefix), 0) != 0)
			exit(255);
}

int main(int argc, char **argv)
{
	(void)argc;
	if (slurm_spank_init(NULL, 0, NULL) != 0)
		return (1);
	read_values(argv, "script=");
	read_values(argv, "--elastic=");
	if (slurm_spank_init_post_opt(NULL, 0, NULL) != 0)
		return (1);
	return (0);
}
