/*
 * SPANK plugin: adds the option --elastic to sbatch, salloc and srun and passes its value on to
 * job_submit.lua, which checks it. Does nothing on compute nodes.
 */

#include "slurm_release.h"

#include <slurm/spank.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As with sbatch's own options, the command line takes precedence over the environment, and the
 * environment over the script. */
#define ENVIRONMENT "SLURM_ELASTIC"
#define OPEN_MODE "SBATCH_OPEN_MODE"

/* Buffer size: more than the longest directive that job_submit.lua accepts (256 bytes), so that a
 * value that is cut here is refused there. */
enum { MAX_BYTES = 512 };

/*
 * slurmd sets these inside an elastic job, and sbatch and salloc read the first as if --elastic
 * were given again: without removing them, jobs submitted by an elastic job would be elastic too.
 */
static const char *const inherited[] = {
	"SLURM_SPANK__SLURM_SPANK_OPTION_elastic_elastic",
	"_SLURM_SPANK_OPTION_elastic_elastic",
	"SLURM_SPANK_ELASTIC",
};

/* The value to pass on, printable ASCII; valid if is_given. */
static char directive[MAX_BYTES];
static bool is_given;

/* Whether --elastic is on the command line, which sbatch reads last. */
static bool on_command_line;

/* -1: not decided; 0: left as the user set it, or not sbatch; 1: set here, to be removed again. */
static int open_mode_is_ours = -1;

static int on_elastic(int value, const char *text, int remote);

static struct spank_option elastic_option = {
	.name = "elastic",
	.arginfo = "MIN-MAX[,key=value...]",
	.usage = "[elastic] run on MIN to MAX GPUs, as the cluster allows; keys: types=a100:v100,"
		 " batch=256-4096, parallel=data|pipeline|hybrid|spatial, freeze=off|auto,"
		 " max-penalty=0.5%, notice=SECONDS, unit=GPUS, sizes=1:2:4, in-place=auto|never,"
		 " plan=own|auto, share=no|yes",
	.has_arg = 1,
	.val = 0,
	.cb = on_elastic,
};

/* Keep the value within bounds: at most MAX_BYTES - 1 bytes, and a question mark, which no
 * directive may hold, for each byte that is not printable ASCII. */
static void copy_printable(char *copy, const char *text)
{
	size_t i;

	for (i = 0; i < MAX_BYTES - 1 && text[i] != '\0'; ++i)
		copy[i] = text[i] >= 0x20 && text[i] <= 0x7e ? text[i] : '?';
	copy[i] = '\0';
}

/*
 * Set the open mode, as an elastic job restarts in the middle of its output file. sbatch reads the
 * script's options, then the environment, then the command line: the variable takes effect when
 * it is set before the second, and --open-mode on the command line overrides it.
 */
static void append_output(void)
{
	if (open_mode_is_ours != -1 || spank_context() != S_CTX_ALLOCATOR)
		return;
	open_mode_is_ours = getenv(OPEN_MODE) == NULL && setenv(OPEN_MODE, "append", 0) == 0;
}

/* Look for --elastic or an abbreviation before options are read. --elastic among the arguments of
 * the user's own program counts too. */
static bool find_on_command_line(void)
{
	static const char option[] = "--elastic";
	FILE *arguments = fopen("/proc/self/cmdline", "re");
	size_t matched = 0;
	bool found = false;
	int c;

	if (arguments == NULL)
		return (false);
	while (!found && (c = getc(arguments)) != EOF) {
		if ((c == '\0' || c == '=') && matched >= strlen("--el") &&
		    matched <= strlen(option))
			found = true;
		else if (c == '\0')
			matched = 0;
		else if (matched <= strlen(option))
			matched = c == option[matched] ? matched + 1 : sizeof(option);
	}
	fclose(arguments);
	return (found);
}

static int on_elastic(int value, const char *text, int remote)
{
	char copy[MAX_BYTES];

	(void)value;
	if (remote)
		return (0);
	copy_printable(copy, text != NULL ? text : "");
	if (is_given && strcmp(directive, copy) != 0 && !on_command_line) {
		slurm_error("elastic: --elastic=%s: differs from --elastic=%s given before;"
			    " keep one",
			    copy, directive);
		return (-1);
	}
	copy_printable(directive, copy);
	is_given = true;
	append_output();
	return (0);
}

static const char *from_environment(void)
{
	const char *text = getenv(ENVIRONMENT);

	return (text != NULL && text[0] != '\0' ? text : NULL);
}

int slurm_spank_init(spank_t sp, int ac, char **av)
{
	(void)ac;
	(void)av;
	if (!is_tried_release())
		return (0);
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
		for (size_t i = 0; i < sizeof(inherited) / sizeof(inherited[0]); ++i)
			unsetenv(inherited[i]);
		on_command_line = find_on_command_line();
		if (on_command_line || from_environment() != NULL)
			append_output();
		break;
	case S_CTX_LOCAL:
		on_command_line = find_on_command_line();
		break;
	case S_CTX_REMOTE:
		break;
	default:
		return (0);
	}
	if (spank_option_register(sp, &elastic_option) != ESPANK_SUCCESS) {
		slurm_error("elastic: cannot register --elastic; is the plugin listed twice?");
		return (-1);
	}
	return (0);
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	const char *environment = from_environment();

	(void)ac;
	(void)av;
	if (open_mode_is_ours == 1)
		unsetenv(OPEN_MODE);
	if (!is_tried_release() ||
	    (spank_context() != S_CTX_ALLOCATOR && spank_context() != S_CTX_LOCAL))
		return (0);
	if (!on_command_line && environment != NULL) {
		copy_printable(directive, environment);
		is_given = true;
	}
	if (!is_given)
		return (0);
	if (spank_job_control_setenv(sp, "ELASTIC", directive, 1) != ESPANK_SUCCESS) {
		slurm_error("elastic: cannot pass --elastic=%s on to slurmctld", directive);
		return (-1);
	}
	return (0);
}
