/*
 * Submits jobs that no sbatch would send: the requests of a user who has a client of his own. Runs
 * in the cluster as that user: cc -o … fuzz_requests.c -lslurm.
 *
 * In: a line for each job of field=HEX words. Out: a line for each: slurmctld's answer, milliseconds
 * until it came, the job, and what it said to the user as HEX. Jobs that it takes are cancelled.
 */

#include <errno.h>
#include <signal.h>
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char *unhex(const char *digits)
{
	size_t length = strlen(digits) / 2;
	char *text = calloc(1, length + 1);
	unsigned int byte;

	for (size_t i = 0; i < length && sscanf(digits + 2 * i, "%2x", &byte) == 1; ++i)
		text[i] = (char)byte;
	return (text);
}

static void set(job_desc_msg_t *job, char **environment, const char *name, char *text)
{
	const struct {
		const char *name;
		char **field;
	} fields[] = {
		{ "req_nodes", &job->req_nodes },	  { "exc_nodes", &job->exc_nodes },
		{ "comment", &job->comment },		  { "admin_comment", &job->admin_comment },
		{ "reservation", &job->reservation },	  { "features", &job->features },
		{ "tres_per_node", &job->tres_per_node }, { "tres_per_job", &job->tres_per_job },
		{ "tres_per_task", &job->tres_per_task }, { "name", &job->name },
		{ "partition", &job->partition },	  { "dependency", &job->dependency },
		{ "extra", &job->extra },		  { "licenses", &job->licenses },
	};

	if (strcmp(name, "spank") == 0) {
		environment[0] = text;
		job->spank_job_env = environment;
		job->spank_job_env_size = 1;
	} else if (strcmp(name, "min_nodes") == 0)
		job->min_nodes = (uint32_t)strtoul(text, NULL, 10);
	else if (strcmp(name, "num_tasks") == 0)
		job->num_tasks = (uint32_t)strtoul(text, NULL, 10);
	else if (strcmp(name, "ntasks_per_node") == 0)
		job->ntasks_per_node = (uint16_t)strtoul(text, NULL, 10);
	for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); ++i)
		if (strcmp(name, fields[i].name) == 0)
			*fields[i].field = text;
}

static void submit(char *line)
{
	char *variables[] = { "A=b", NULL }, *environment[2] = { NULL }, *word;
	submit_response_msg_t *answer = NULL;
	struct timespec begin, end;
	job_desc_msg_t job;
	int code;

	slurm_init_job_desc_msg(&job);
	job.user_id = getuid();
	job.group_id = getgid();
	job.work_dir = "/tmp";
	job.name = "request";
	job.std_out = "/dev/null";
	job.script = "#!/bin/sh\ntrue\n";
	job.environment = variables;
	job.env_size = 1;
	job.min_nodes = 1;
	job.begin_time = time(NULL) + 3600;
	for (word = strtok(line, " \n"); word != NULL; word = strtok(NULL, " \n")) {
		char *value = strchr(word, '=');

		*value = '\0';
		set(&job, environment, word, unhex(value + 1));
	}
	clock_gettime(CLOCK_MONOTONIC, &begin);
	code = slurm_submit_batch_job(&job, &answer) == SLURM_SUCCESS ? 0 : errno;
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("%d %ld %u ", code,
	       (end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000,
	       answer != NULL ? answer->job_id : 0);
	for (char *c = answer != NULL ? answer->job_submit_user_msg : NULL; c != NULL && *c; ++c)
		printf("%02x", (unsigned char)*c);
	printf("\n");
	fflush(stdout);
	if (code == 0)
		slurm_kill_job(answer->job_id, SIGKILL, 0);
}

int main(void)
{
	char *line = NULL;
	size_t size = 0;

	slurm_init(NULL);
	while (getline(&line, &size, stdin) > 0)
		submit(line);
	return (0);
}
